"""Uses of the public API as type checkers see them."""
