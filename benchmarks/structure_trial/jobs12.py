
from jobs9 import rows
JOBS=[rows("fwd v4", 256, 4, False, "v4"), rows("fwd v4 gather", 256, 4, False, "v4", INDEXED=True, GATHER=True)]+[rows(f"fwd {v} gather", 256, 4, False, v, INDEXED=True, GATHER=True) for v in ("v9","v10",)]
