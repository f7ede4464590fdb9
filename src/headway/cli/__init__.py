"""The command line: one thin file for each verb, registered in `application.VERBS`. Nothing imports this room."""
