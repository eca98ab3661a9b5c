"""What looks into workers for the agent: their stacks, who comes last to a collective, samples, debuggers."""
