"""Steps that the layers of any framework share: projection, aggregation, attention and bias."""
