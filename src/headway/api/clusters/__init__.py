"""Clusters on which text is prepared (`headway data prepare --on`)."""
