"""What joins the wings before work begins: checks, a store for a run, suites and pools on clusters."""
