"""Object stores: one class per provider, and the errors of their drivers in binidx's terms."""
