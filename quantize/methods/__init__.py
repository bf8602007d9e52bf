"""Methods that need activations: functions from a weight and what calibration saw of its inputs to codes and scales."""
