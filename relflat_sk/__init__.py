"""Relative flatness of trained networks for scikit-learn, skorch and Optuna.

The public names stand in ``__init__.pyi``. A package is imported when a name of it is first used.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
del lazy_loader
