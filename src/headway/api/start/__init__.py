"""What joins the wings before work begins: checks, a run's token store, suites and text preparation on clusters."""
