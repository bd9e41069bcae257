"""One attach: from the model to the Watch, and from the end of a step to the agent."""
