"""Names of this package under the path of torch's module that has them."""

from __future__ import annotations

from elastic_run.utils import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
