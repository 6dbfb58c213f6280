"""Pure decisions and single parts; under two seconds in all."""
