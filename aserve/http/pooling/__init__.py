"""What asks a model that pools: embeddings, scores, reranking, classification, and whatever else it makes."""
