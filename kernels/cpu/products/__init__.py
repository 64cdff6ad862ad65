"""Matrix products in float32 and int8 whose every output is summed in one fixed order, whatever the batch."""
