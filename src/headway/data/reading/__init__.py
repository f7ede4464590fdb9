"""Where text comes from: sources, files here and behind URLs, formats, and how they are cut into pieces."""
