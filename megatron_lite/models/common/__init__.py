"""What every model family uses: embeddings and the language module."""
