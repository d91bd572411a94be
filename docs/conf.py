"""How `make docs` builds these pages: MyST for Markdown, autodoc and napoleon for the API reference."""

import cute_kernels

project = "cute_kernels"
author = "the cute_kernels authors"
version = release = cute_kernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "cute_kernels"
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and dtypes beside the types
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Numerics", "Source", "Example", "Errors", "Yields"]
