"""Settings of Sphinx: `make docs` builds the site into out/site."""

from sphinx_gallery.sorting import ExplicitOrder

import relflat_sk

project = "relflat_sk"
author = "The relflat_sk developers"
version = release = relflat_sk.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["README.md"]

myst_heading_anchors = 3
numpydoc_show_class_members = False  # the class pages list them
# scikit-learn adds these methods; their docstrings refer to its own site
autodoc_default_options = {
    "exclude-members": "set_fit_request, set_partial_fit_request, set_score_request",
}
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
        "plot_ensemble.py",
        "*",
        "plot_grid_search.py",
        "plot_study.py",
        "plot_torch_loop.py",
        "plot_lightning.py",
        "plot_trainer.py",
    ]),
    "abort_on_example_error": True,
    "show_memory": False,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = "relflat_sk"
html_theme_options = {"show_prev_next": False, "show_toc_level": 2}
html_sidebars = {"start": []}
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # its pages make anchors by script
