"""Admin pages on nodes, backends, their models, aliases and strategies."""

from backends.admin import backend, model, names, node

__all__ = ["backend", "model", "names", "node"]
