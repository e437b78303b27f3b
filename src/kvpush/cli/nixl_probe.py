"""`python -m kvpush.cli.nixl_probe`: make a NIXL agent the way a transfer thread does, and say which plugins it has."""
