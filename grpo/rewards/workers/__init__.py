"""The processes that call the reward functions: calls with a deadline, workers that can be killed."""
