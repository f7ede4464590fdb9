"""Work of other wings on clusters: text that is prepared there (`headway data prepare --on`), suites as jobs."""
