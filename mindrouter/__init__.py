"""The router: its gateway, its pages, its commands."""

import scheduler  # noqa: F401  before anything else is: it says what is machine code
