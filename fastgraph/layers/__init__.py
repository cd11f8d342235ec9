"""What the layers of any framework share: how they project, aggregate, attend and add up."""
