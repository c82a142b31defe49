"""`prfaas evaluate`: a case of the planner and the simulator, live: all is real but the arithmetic of the model."""
