"""Settings of Sphinx: `make docs` builds the site into out/site."""

import re
import warnings

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx_gallery.sorting import ExplicitOrder

import relflat_sk

# the pages of the gallery would show them, with paths of the machine
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

project = "relflat_sk"
author = "The relflat_sk developers"
version = release = relflat_sk.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["README.md", "releasing.md"]

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
numpydoc_show_class_members = False  # the class pages list them
LEFT_OUT = [
    # scikit-learn adds these methods; their docstrings refer to its own site
    *("set_fit_request", "set_partial_fit_request", "set_score_request"),
    # skorch calls these methods of nets
    *("evaluation_step", "fit_loop", "forward_iter", "get_iterator", "get_params_for_optimizer"),
    *("get_split_datasets", "initialize_callbacks", "initialize_criterion", "initialize_module"),
    *("infer", "initialize_optimizer", "notify", "run_single_epoch", "torch_compile", "train_step"),
    *("train_step_single", "validation_step"),
    # trainers call these methods of callbacks
    *("on_batch_begin", "on_batch_end", "on_epoch_begin", "on_epoch_end", "on_train_begin"),
    "on_train_end",
    # other packages of the library call these
    *("measure", "plan", "run", "train", "without_value"),
    # properties of displays, which their lists of attributes have
    *("ax_", "figure_"),
]
autodoc_default_options = {"exclude-members": ", ".join(LEFT_OUT)}
# methods that RelativeFlatnessPenaltyCV has from scikit-learn refer to its glossary
suppress_warnings = ["ref.ref", "ref.term"]
toc_object_entries_show_parents = "hide"
autodoc_typehints = "none"  # the docstrings have types in words
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    # what flatness is, what it is good for, and how to use it in other libraries
    "within_subsection_order": ExplicitOrder([
        "plot_loss_surface.py",
        "plot_robustness.py",
        "plot_rescaling.py",
        "plot_label_noise.py",
        "plot_batch_sizes.py",
        "plot_limit.py",
        "plot_layers.py",
        "plot_methods.py",
        "plot_ensemble.py",
        "plot_displays.py",
        "plot_rank_classifiers.py",
        "plot_fine_tuning.py",
        "plot_adapters.py",
        "*",
        "plot_grid_search.py",
        "plot_study.py",
        "plot_torch_loop.py",
    ]),
    "abort_on_example_error": True,
    "backreferences_dir": "gallery/uses",  # for the examples on the pages of the API
    "doc_module": ("relflat_sk",),
    "image_srcset": ["2x"],  # for screens of high resolution
    "show_memory": False,
    "min_reported_time": 10**6,  # times of a busy machine mean nothing
    "write_computation_times": False,  # the page would load scripts from another site
    "remove_config_comments": True,
}

html_math_renderer = "mathml"  # MathJax would be fetched from another site
html_theme = "pydata_sphinx_theme"
html_title = "relflat_sk"
html_theme_options = {
    "show_toc_level": 2,
    "header_links_before_dropdown": 7,
    "navbar_persistent": ["search-button"],  # an icon, which leaves room for the links
}
html_sidebars = {"start": []}  # a page without a section
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # its pages make anchors by script


def add_formula(translator, node):
    """Write a formula as MathML, which browsers show without a script."""
    block = isinstance(node, nodes.math_block)
    tex = node.astext()
    if r"\\" in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    translator.body.append(tex2mathml(tex, as_block=block))
    raise nodes.SkipNode


def link_names(app, document):
    """Let names of the API in running text lead to their pages, and not back to their own."""
    page = app.env.docname
    for node in list(document.findall(lambda node: isinstance(node, NAMES))):
        name = node.astext()
        if name not in PAGES or page.endswith(f".{name}") or isinstance(node.parent, LINKS):
            continue
        target = pending_xref("", refdomain="py", reftype="obj", reftarget=PAGES[name], refdoc=page)
        node.replace_self(target)
        target += nodes.literal(name, name)


def link_gallery(app, page, source):
    """Let links to files of the gallery, as GitHub has them, lead to the pages made of these."""
    link = re.compile(r"\]\(\.\./examples/gallery(?:/(\w+)\.py)?\)")
    source[0] = link.sub(lambda match: f"](gallery/{match[1] or 'index'}.rst)", source[0])


def shorten_classes(app, what, name, obj, options, signature, returns):
    """Write classes among the defaults of a signature by their names alone."""
    short = None if signature is None else re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", signature)
    return short, returns


NAMES = nodes.literal, nodes.title_reference  # of Markdown, and of docstrings
LINKS = nodes.reference, pending_xref, nodes.title
PACKAGES = {"exceptions", "fleet", "measures", "minima", "plots", "search", "theory", "training"}
PAGES = {name: f"relflat_sk.{name}" for name in relflat_sk.__all__ if name not in PACKAGES}
PAGES["relflat_sk.minima"] = "relflat_sk.minima"
del PAGES["measure"]  # is an argument of many functions as well


def setup(app):
    """Register the functions above."""
    app.add_html_math_renderer("mathml", (add_formula, None), (add_formula, None))
    app.connect("autodoc-process-signature", shorten_classes)
    app.connect("doctree-read", link_names)
    app.connect("source-read", link_gallery)
