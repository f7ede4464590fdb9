"""Projects of a team: `headway init` renders them, and brings later templates into them."""
