"""pipeinfer: one large GGUF model over the machines of a cluster, with speculation that keeps the pipeline full."""

__version__ = "0.2.0"
