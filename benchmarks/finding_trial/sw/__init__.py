from .specialized import rows_specialized
from .specialized_weight import weight_specialized
