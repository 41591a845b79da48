"""A reward that does not import."""

import no_such_package_anywhere  # noqa: F401
