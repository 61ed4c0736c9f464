"""What a node computes by itself: training, gradients, curvature, evaluation."""
