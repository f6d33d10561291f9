"""Tasks and graders: prompts for the model and scores for its answers. Never imports torch.

`environment_for(run)` returns the run's environment with its digest checked. `Environment.grade`
returns the run's own reward, bit-identical on every machine.
"""
