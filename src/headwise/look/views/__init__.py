"""Views of a look: tables, figures, notebook output, the model card."""
