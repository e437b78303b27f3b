"""The kvpush command."""
