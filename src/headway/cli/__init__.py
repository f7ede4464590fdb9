"""The command line: one thin file for each verb, listed in `application.VERBS`. Nothing imports this room.

Folders go by what a user is about: `start`, `data`, `training`, `measure`, `runs`, `models`, `cost`.
"""

import sys

from headway.core.startup.early_stop import answer_early_signals

answer_early_signals(sys.argv[1:])  # before the slow imports
