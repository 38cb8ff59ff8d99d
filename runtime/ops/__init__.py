"""The arithmetic over checked tensors: products, activations, routing, a layer, their gradients. Uses launch."""
