"""The verbs: each composes rooms, returns a result with `to_dict()`, and prints nothing."""
