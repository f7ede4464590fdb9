"""A net under changes of the code: what must stay as it is, recorded once and compared by tests."""
