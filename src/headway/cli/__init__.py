"""The command line: one thin file for each verb, registered in `application.VERBS`. Nothing imports this room."""

import sys

from headway.core.startup.early_stop import answer_early_signals

answer_early_signals(sys.argv[1:])  # before the slow imports
