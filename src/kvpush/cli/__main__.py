"""`python -m kvpush.cli`: the same as `kvpush`."""

from kvpush.cli.main import main

main()
