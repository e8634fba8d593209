"""What flatness is worth: as a predictor of the gap, as a criterion of choice, as a penalty."""
