class CustomRecipe:
    """Keeps a factory."""

    def __init__(self, qfactory, backward_override=None):
        self.qfactory, self.backward_override = qfactory, backward_override
