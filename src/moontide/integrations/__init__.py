"""Labels in and out of other tools: one file per tool, and `Labels`, what all of them write.

    coco            COCO Camera Traps JSON, one annotation per image
    megadetector    JSON of MegaDetector, which Timelapse reads, and of SpeciesNet
    label_studio    tasks with predictions for Label Studio, and its annotations as known labels
    fiftyone        a folder that FiftyOne imports, and labels of one that it exported
    huggingface     columns of a Hugging Face dataset, and embeddings of its images
    vectors         Parquet with vectors, for LanceDB and Embedding Atlas

cleanlab needs no file: it takes `result.probs` as they are.
"""

from moontide.integrations.labels import Labels

__all__ = ["Labels"]
