"""What runs say, and how sure one can be. Reads folders; knows neither torch nor training."""
