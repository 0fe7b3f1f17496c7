"""`python -m aserve`: the same as the `aserve` command."""

from aserve.cli import main

raise SystemExit(main())
