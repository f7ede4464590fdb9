"""Reading of input text: sources, local and remote files, formats, and their division into pieces."""
