"""What happens before a run begins: its config from a folder of text, the checks, its token store."""
