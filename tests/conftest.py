"""For all tests: properties are judged by what they find, never by a machine's speed, and in CI by the same examples
each time; elsewhere every run looks for new ones.
"""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
