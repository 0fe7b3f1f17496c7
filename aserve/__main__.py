"""`python -m aserve`, and the `aserve` command."""


def run() -> int:
    """The exit status. Ctrl-C while the command line itself is being loaded is as quiet as later."""
    try:
        from aserve.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(run())
