"""The command line: flags, how they are read, and the commands.

words       how a word is read
flags       which flags there are
settings    what was wished: flags before the environment, that before a file, that before defaults
commands    serve and chat
"""

from aserve.cli.commands import main

__all__ = ["main"]
