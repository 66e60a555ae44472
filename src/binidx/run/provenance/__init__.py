"""Which documents a run reads at which step: trace, where, account, export, bake."""
