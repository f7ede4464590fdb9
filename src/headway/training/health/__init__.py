"""Steps that are not as they should be: the decision about one, its execution, and the search for bad hardware."""
