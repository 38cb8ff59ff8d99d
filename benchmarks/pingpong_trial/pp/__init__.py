from .rows import rows_specialized
from .weight import weight_specialized
