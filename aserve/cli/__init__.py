"""The command line: flags, how they are read, and the commands.

words, flags, tool_flags    how a word is read, and which flags there are
foreign_flags               vLLM's, which there are not
command_table, parser       the commands, and their help
settings                    what was wished: flags before the environment, that before a file, that before defaults
checks                      mistakes that are found before torch is loaded
commands                    serve and batch; others have a room each: chat, complete, bench, models, doctor, completion
asking                      whom chat and complete ask
"""

from aserve.cli.commands import main

__all__ = ["main"]
