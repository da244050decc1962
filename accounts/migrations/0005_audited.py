import audit.records
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0004_limits_and_scopes'),
    ]

    operations = [
        migrations.AddField(
            model_name='historicalapikey',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalapikey',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalapikey',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalboost',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalboost',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalboost',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalgroup',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalgroup',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalgroup',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalmodellimits',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalmodellimits',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalmodellimits',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalquota',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalquota',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalquota',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicaluser',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicaluser',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicaluser',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        # rows that are there say nothing of it
        migrations.AlterField(
            model_name='historicalapikey',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalapikey',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalapikey',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalboost',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalboost',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalboost',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalgroup',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalgroup',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalgroup',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalmodellimits',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalmodellimits',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalmodellimits',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalquota',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalquota',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalquota',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicaluser',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicaluser',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicaluser',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
    ]
